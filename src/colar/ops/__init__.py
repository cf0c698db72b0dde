"""Functions of tensors and numbers alone, and `devices`: capabilities of devices, and transfers that do not wait."""
