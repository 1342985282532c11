"""What PyTorch's own tests of FSDP2 ask, asked of graphshard beside the real FSDP2; `counterparts.py` lists them all."""
