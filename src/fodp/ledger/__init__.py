"""What has been spent, durably: events are written down before their releases are used. Knows nothing of torch."""

from fodp.ledger.account import Account as Account
from fodp.ledger.book import Ledger as Ledger
