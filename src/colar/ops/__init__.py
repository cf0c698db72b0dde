"""Functions of tensors and numbers alone, and `devices`: what each kind of device has, and what it waits for."""
