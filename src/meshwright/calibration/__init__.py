"""Measured values that the cost model reads: parameters with their priors, and corrections of one device.

parameters     parameters of the cost model: priors, fitted offsets, and their uncertainty
device         one measured device: the file that `meshwright calibrate` writes
correction     efficiency correction of a kernel as a function of its shape
communication  measured seconds of collectives, by message size and number of processes
collectives    constants of link technologies
memory         constants of software stacks and their allocators
data/          the values, each with its source
"""
