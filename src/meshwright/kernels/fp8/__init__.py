"""Linear layers in 8 bits and below: number formats, casts, scaled GEMMs, the layer and its weight cache."""
