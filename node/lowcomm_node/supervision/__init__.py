"""The trainer's life as the daemon leads it: started, watched, started again after a failure, given up when that is no use."""
