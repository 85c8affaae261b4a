"""Public contracts, one module an operator. Their module paths are private: import the functions from ``atrex``."""
