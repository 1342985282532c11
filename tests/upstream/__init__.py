"""What PyTorch's own tests of FSDP2 ask, asked of graphshard beside FSDP2; `counterparts.py` lists them all."""
