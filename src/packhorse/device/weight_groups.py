"""The matrices of a model, and the modules that share each of them."""

from torch import Tensor, nn

__all__ = ["WeightGroup", "weight_groups"]


class WeightGroup:
    """The modules that share a weight, by name. The group holds no reference to the weight, so the
    weight is freed as soon as no module holds it.

    Attributes:
        modules: the modules, by their names in the model.
    """

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}

    @property
    def name(self) -> str:
        """The names of all modules."""
        return " = ".join(self.modules)

    @property
    def is_multiplied(self) -> bool:
        """Whether a linear layer is among the modules."""
        return any(isinstance(module, nn.Linear) for module in self.modules.values())

    @property
    def parameter_names(self) -> list[str]:
        """The names of the weight in the model."""
        return [f"{name}.weight" if name else "weight" for name in self.modules]

    @property
    def weight(self) -> Tensor:
        """The weight that the modules hold now."""
        weight: Tensor = next(iter(self.modules.values())).weight  # type: ignore[assignment]
        return weight


def weight_groups(model: nn.Module) -> list[WeightGroup]:
    """All matrices called `weight` that are parameters, in the order of the modules."""
    groups: dict[int, WeightGroup] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.dim() == 2:
            groups.setdefault(id(weight), WeightGroup()).modules[name] = module
    return list(groups.values())
