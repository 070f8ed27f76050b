"""scikit-learn with pandas: a public schema instead of a fitted scaler: pip install "fodp[sklearn]" pandas."""

import numpy as np
from sklearn.metrics import accuracy_score

import fodp
from fodp.sklearn import PrivateLogisticRegression

try:
    from pandas import DataFrame
except ImportError:  # a dictionary of columns does as well
    DataFrame = dict

rng = np.random.default_rng()


def people(size):
    age, town = rng.integers(0, 100, size), rng.choice(["Ulm", "Bonn", "Rome"], size)
    return DataFrame({"age": age, "town": town}), np.where(age + 20 * (town == "Ulm") > 60, "yes", "no")


private, ill = people(2000)
public, known = people(500)

model = PrivateLogisticRegression(
    epsilon=2,
    delta=1e-5,
    public_size=2000,  # about; as anybody may know it, not counted
    classes=["no", "yes"],
    schema={"columns": {"age": {"bounds": [0, 110]}, "town": {"values": ["Ulm", "Bonn"]}}},
    ledger=fodp.Ledger("people.sqlite", dataset="people", budget=(4, 1e-5)),  # every fit is charged
)
model.fit(private, ill)
print(model.statement())
accuracy = accuracy_score(known, model.predict(public))
print(f"accuracy {accuracy:.2f} on public rows, epsilon {model.epsilon_:.2f}")
