"""The cost model: cycles and code size of register tiles and of whole plans."""
