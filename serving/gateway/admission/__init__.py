"""Who is let in, who waits at the door, and when those who are refused should come back."""
