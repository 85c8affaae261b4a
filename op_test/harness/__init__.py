"""What the operator tests share: references, inputs, comparison."""
