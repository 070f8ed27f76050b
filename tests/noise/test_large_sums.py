"""Sums over millions of examples: one of them moves the sum by what the query says, also in a float32 model."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fodp.gradients import Gradients
from fodp.layout import Layout
from fodp.noise import Streams, exact
from fodp.queries import Query
from fodp.release import release


class TestSumsOverMillions:
    """One record moves a sum by its own share, also where float32 no longer counts that far (dp-is reads all data)."""

    SIZE, BOUND = 4_000_000, 0.3

    @pytest.fixture
    def asked(self):
        """Gradients without a model: as if a source had measured these norms, 1000 at a time."""

        def ask(norms):
            parts = [SimpleNamespace(norms=part, finite=lambda values: values) for part in norms.split(1000)]
            return Gradients(parts, Layout(nn.Linear(1, 1)))

        return ask

    def norms(self):
        return torch.rand(self.SIZE, generator=torch.Generator().manual_seed(0)) * 0.6

    @pytest.mark.rule(3)
    @pytest.mark.parametrize("place", [0, 1234, 3_999_999])
    def test_one_record_moves_the_normaliser_by_its_own_norm(self, asked, place):
        norms = self.norms()
        norms[place] = 1.0  # clipped to the bound
        others = torch.cat([norms[:place], norms[place + 1 :]])
        moved = asked(norms).norm_sum(self.BOUND).value.double() - asked(others).norm_sum(self.BOUND).value.double()
        assert 0.999 * self.BOUND <= moved.item() <= self.BOUND * (1 + 1e-6)

    @pytest.mark.rule(3)
    def test_one_record_moves_a_count_by_one_half(self, asked):
        norms = self.norms()

        def fraction(norms):
            return 0.5 + norms / 2  # no whole numbers, of which float32 would count sixteen millions

        moved = asked(norms).count(fraction).value.double() - asked(norms[1:]).count(fraction).value.double()
        assert abs(moved.item()) <= 0.5 * (1 + 1e-6)
        assert moved.item() == pytest.approx(norms[0].item() / 2, abs=1e-6)

    @pytest.mark.parametrize("add_noise", [release, exact.release])
    def test_the_noise_is_that_of_the_models_own_type(self, asked, add_noise):
        query = asked(self.norms()).norm_sum(self.BOUND)
        noisy = add_noise(query, 15.0, Streams.seeded(0), 3, "noise")
        alone = add_noise(Query(torch.zeros(()), self.BOUND), 15.0, Streams.seeded(0), 3, "noise")
        assert noisy.dtype == alone.dtype == torch.float32
        assert noisy.item() - query.value.item() == pytest.approx(alone.item(), abs=0.1)  # 2^-24 of the sum
