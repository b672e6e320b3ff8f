"""Read configurations of torchtitan, which are programs in Python, as text. Nothing of them runs. Imports no torch."""
