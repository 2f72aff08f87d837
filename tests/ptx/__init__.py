"""An emulator of PTX, for tests: see README.md."""
