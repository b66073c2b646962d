"""The Kubernetes API as this project uses it: calls, lists that follow, leases. Objects stay JSON."""
