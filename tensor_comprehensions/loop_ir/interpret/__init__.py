"""Loop programs run on NumPy, slowly, with every access checked."""
