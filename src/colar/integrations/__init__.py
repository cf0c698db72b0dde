"""Adapters to third-party programs.

lm_eval       lm-evaluation-harness: a checkpoint as its model, our data sets as its tasks
ray_cluster   a connection to a Ray cluster, and the sampling of GRPO's outputs by its actors
ray_answers   `colar generate` and `colar evaluate` on a cluster
"""
