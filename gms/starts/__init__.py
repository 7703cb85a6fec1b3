"""When a waiting workload will start: an interval, from sampled futures of the queue and from past errors; pure."""
