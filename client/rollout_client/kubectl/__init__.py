"""``kubectl-rr``: the kubectl plugin (extra ``kubectl``)."""
