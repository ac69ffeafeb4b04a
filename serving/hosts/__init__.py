"""Several hosts that serve one model together: host 0 decides nothing alone, it only hears of everything first."""
