"""LBFGS with a closure, lazy layers, a callable schedule with a state, resets of a layer, a compiled model."""

import torch
from torch import nn

from mizzen import Checkpointer


class Plateau:
    def __init__(self):
        self.factor, self.best = 1.0, None

    def see(self, loss):
        if self.best is not None and loss > 0.97 * self.best:
            self.factor *= 0.8
        self.best = loss if self.best is None else min(self.best, loss)

    def __call__(self, step):
        return self.factor


torch.manual_seed(8)
x = torch.randn(50, 4)
y = x.prod(1, keepdim=True)
net = nn.Sequential(nn.LazyLinear(10), nn.Tanh(), nn.Linear(10, 1))
model = torch.compile(net, backend="eager")
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5, line_search_fn="strong_wolfe")
plateau = Plateau()
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, plateau)
checkpointer = Checkpointer()
checkpointer.track(model=model, optimizer=optimizer, scheduler=scheduler)
for step in range(checkpointer.restore(), 14):
    rows = torch.randperm(50)[:40]

    def closure(rows=rows):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
        loss.backward()
        return loss

    plateau.see(float(optimizer.step(closure)))
    scheduler.step()
    if step == 7:
        net[2].reset_parameters()
    checkpointer.step(step + 1)
torch.save([net.state_dict(), plateau.factor, plateau.best], "model.pt")
