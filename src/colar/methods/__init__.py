"""Ways of learning to think and of thinking: one file or folder a method, one line in `registry`.

A row is one sequence of a batch: an example in training, a request while it thinks, a sampled output in reinforcement.
A group is the reasoning tokens that one latent stands for.

base           the interface, and the rows that are learnt from;  thinking: a step of thinking and its reply
colar, sequential   the paper's method and ours, over `grouping` and `factors`
cot, icot, coconut, distill, pause, tokenskip, ruplar, sim_cot   the others
soft_tokens    embeddings mixed by probabilities
losses, unroll      cross-entropy of rows; training through hidden states that are fed
rollouts       log-probabilities of sampled outputs, for reinforcement
pretrained     a model and its method: saved, loaded;  converted reads earlier versions
"""
