"""Wrappers of optimizers: float32 copies of 16-bit parameters, and owners of matrices.

Elementwise optimizers run on shards. Muon, Shampoo and SOAP do not: they multiply whole matrices. Gathering every
matrix on every rank repeats the same work on all of them. Here each matrix has one owner, which receives its gradient,
computes the update, and sends every rank its piece of the result:

    shards of gradients  --all-to-all-->  whole gradients at their owners
                                          the optimizer's own step, on plain tensors
    shards of parameters <--all-to-all--  whole parameters at their owners

Why shards travel after the reduction, instead of reducing each gradient to its owner: on n ranks an all-to-all moves
1/n of a gradient's bytes per rank, where the reduce-scatter moves all of them. So shards, state dicts and programs stay
as FSDP has them, for 3/n of one reduce-scatter: a gradient, a parameter, and the parameter back.
"""

from graphshard.optim.master_weights import MasterWeights as MasterWeights
from graphshard.optim.matrix_optimizer import MatrixOptimizer as MatrixOptimizer

__all__ = ["MasterWeights", "MatrixOptimizer"]
