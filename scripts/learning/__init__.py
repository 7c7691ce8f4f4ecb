"""Is learning real, and is it not copying? Paired runs with and without training, and the policies on fixed parents."""
