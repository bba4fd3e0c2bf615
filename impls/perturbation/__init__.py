"""What people train with: perturb(), Population, layers, operators, schemes as an interface, noise."""
