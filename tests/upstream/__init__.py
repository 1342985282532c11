"""Counterparts of PyTorch's tests of FSDP2, which compare graphshard with FSDP2; `counterparts.py` lists them all."""
