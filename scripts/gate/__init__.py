"""How often the publish gate errs: real optimizer steps on stored grids, served by a real engine under right and wrong names."""
