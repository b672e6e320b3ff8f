"""Read configurations of torchtitan, which are programs in Python, as text. Nothing of them runs. Imports no torch.

values     values of the programs: classes, instances, functions, and names from outside
natives    functions and methods of Python that the reader has, within limits
calls, expressions, reader    what attributes, calls, expressions and statements mean
modules    the text of modules: beside the file, of an installed torchtitan, or of its release as data
tree       a configuration as the tree of its classes
"""
