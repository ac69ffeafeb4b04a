"""The protocol between gateway and replica, and the code generated from it."""
