"""Cost of a step: time, memory, energy, money, goodput. Start at `step`.

flops, stages     what there is to do, and which rank does it
compute           kernels on one device             collectives, groups, overlap   bytes between devices
layers, update    one layer; what happens once a step          pipeline            filling and draining
mfu               model FLOPs utilization
step              all of it together                           memory              bytes per device
rates             datasheet and calibration joined             uncertainty         how sure
goodput, energy, money             beyond the step
"""
