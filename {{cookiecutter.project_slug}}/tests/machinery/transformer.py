"""A network with norms, attention and a convolution, to put into model.py in place of the small one."""

TRANSFORMER = """
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.factor = nn.Linear(16, 16), nn.Parameter(torch.full((16,), 0.3))

    def forward(self, values):
        return self.inner(values) * self.factor


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.layers = nn.Sequential(nn.GroupNorm(2, 6), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.scaled = Scaled()

    def forward(self, values):
        normed = self.norm(values)
        values = values + self.attention(normed, normed, normed, need_weights=False)[0]
        return values + self.scaled(self.layers(values))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(8, 16), nn.Parameter(0.1 * torch.randn(6, 16))
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.convolution, self.norm, self.head = nn.Conv1d(16, 16, 3), nn.LayerNorm(16), nn.Linear(16, 2)

    def forward(self, inputs):
        values = self.tokens((2 * inputs).long().clamp(-4, 3) + 4) + self.positions
        for block in self.blocks:
            values = block(values)
        values = self.convolution(values.transpose(1, 2)).float().mean(2)
        return self.head(self.norm(values))


def build_model("""
