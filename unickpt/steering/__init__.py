"""Steering: a rendezvous backend for torchrun whose hosts can leave, return, wait as spares, and be parked."""
