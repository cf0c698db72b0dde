"""Ways of learning to think and of thinking: one file or folder a method, one line in `registry`.

base           the interface, and the tensors that go through it
colar, sequential   the paper's method and ours, over `grouping`
cot, icot, coconut, distill, pause, tokenskip   the others
losses, unroll      cross-entropy of rows; training through hidden states that are fed
rollouts       log-probabilities of sampled outputs, for reinforcement
pretrained     a model and its method: saved, loaded;  converted reads earlier versions
"""
