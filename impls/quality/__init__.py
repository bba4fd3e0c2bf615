"""Quality of a scheme's gradient estimate: kappa, structure of the noise, cosine with backpropagation."""
