def load_live(p): raise NotImplementedError
def live_scenario(*a): raise NotImplementedError
def change(*a): raise NotImplementedError
