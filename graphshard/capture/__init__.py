"""From a module and one call to a joint ATen graph; and which captured program serves a call."""
