"""How options are declared, and read from recipes."""
