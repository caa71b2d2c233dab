"""Points of an orbit that are chosen for a purpose."""
