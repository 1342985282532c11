"""The order of passes on one screen; what is verified and recorded between them."""
