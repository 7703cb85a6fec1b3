"""Sharpness-aware minimization: two passes for each batch, batch norms that only the first one updates."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.norm(torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]))
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * group["rho"] / (norm + 1e-12))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


def running(model, on):
    for m in model.modules():
        if isinstance(m, nn.BatchNorm1d):
            m.momentum = 0.1 if on else 0.0


torch.manual_seed(2)
loader = ResumableLoader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 3))
optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
ckpt = Checkpointer()
ckpt.track(
    model=model, base_optimizer=optimizer.base_optimizer, optimizer=optimizer, scheduler=scheduler, loader=loader
)
step = ckpt.restore()
for _ in range(loader.epoch, 4):
    for x, y in loader:
        running(model, True)
        nn.functional.cross_entropy(model(x), y, label_smoothing=0.1).backward()
        optimizer.first_step(zero_grad=True)
        running(model, False)
        nn.functional.cross_entropy(model(x), y, label_smoothing=0.1).backward()
        optimizer.second_step(zero_grad=True)
        step += 1
        ckpt.step(step)
    scheduler.step()
torch.save([model.state_dict(), [g["lr"] for g in optimizer.param_groups]], "model.pt")
