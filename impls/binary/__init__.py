"""Networks of bits: packing, bitwise products, operators on packed bits, and layers for a user's model."""
