"""What measurements taught the cost model: parameters with their priors, and corrections of one device.

parameters     parameters of the cost model: priors, fitted offsets, and their uncertainty
device         one measured device: the document that `meshwright calibrate` writes
correction     efficiency correction of a kernel as a function of its shape
communication  collectives as they were measured, by message size
collectives    constants of link technologies
memory         constants of software stacks and their allocators
data/          the values, each with its source
"""
