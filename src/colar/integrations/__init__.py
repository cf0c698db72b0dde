"""Adapters to third-party programs.

lm_eval       lm-evaluation-harness: a checkpoint as its model, our data sets as its tasks
ray_cluster   a connection to a Ray cluster
ray_answers   `colar generate` and `colar evaluate` on a cluster
"""
