"""SWA with its schedule from the third epoch on; the batch norms are updated over the training data at the end."""

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader

torch.manual_seed(0)
loader = ResumableLoader(TensorDataset(torch.randn(48, 5), torch.randn(48, 1)), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
swa_model, swa_scheduler, swa_start = AveragedModel(model), SWALR(optimizer, swa_lr=0.02, anneal_epochs=2), 2

ckpt = Checkpointer()
ckpt.track(
    model=model, swa_model=swa_model, optimizer=optimizer, scheduler=scheduler, swa_scheduler=swa_scheduler,
    loader=loader,
)  # fmt: skip
step = ckpt.restore()
for epoch in range(loader.epoch, 6):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        step += 1
        ckpt.step(step)
    if epoch >= swa_start:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
update_bn(loader, swa_model)
torch.save([model.state_dict(), swa_model.state_dict(), optimizer.state_dict()], "model.pt")
