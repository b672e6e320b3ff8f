"""Time of a pipeline-parallel step, and the activations that it keeps.

schedules    the order of operations on every rank: gpipe, 1f1b, interleaved, zero_bubble, zbv, dualpipe
graph        the operations that each operation waits for, built once per shape
simulate     the longest path through that graph, for any stage times, one plan or many
closed_form  waiting time of even stages as formulas on arrays, for screening
"""
