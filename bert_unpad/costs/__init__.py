"""What a training step costs: `simulate` and `plan` are commands over these models.

compute, stragglers     what ranks compute, and how unequally
network, links          links by name, collectives on them
gradient_buckets, sync  what travels to average gradients, and weights
overlap                 what of that the backward pass hides
step                    all of it: the time of a step
memory, device, cards   what a rank needs, what its hardware gives
workload, inputs        what is trained; models and lengths by name
timing, measure, replica    the same of a real machine, measured; these need the trainer
"""
