"""Messages that cross the wire: frozen pydantic models, importable by everything, importing nothing heavy."""
