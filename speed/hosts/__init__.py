"""The hosts the engine works in. The only modules that import them, and only when used."""
