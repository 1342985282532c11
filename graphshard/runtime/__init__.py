"""One step on one rank: shards, process groups, executors, autograd, microbatches."""
