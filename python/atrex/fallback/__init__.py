"""PyTorch fallbacks, one module an operator: any device, differentiable."""
