"""Weight transfers with a fault, loaded into vLLM's worker by `worker_extension_cls`, whose import registers them."""

from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngineFactory,
)
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
)

from fr_lightning.engines.vllm_transfer import SafetensorsTransfer


class ForgetsTiedHead(SafetensorsTransfer):
    """vLLM's own end of an update, without what this package adds."""

    def finish_weight_update(self):
        finalize_layerwise_reload(self.model, self.model_config)


class AppliesNothing(SafetensorsTransfer):
    def receive_weights(self, update_info):
        return


for name, transfer in (("forgets_tied_head", ForgetsTiedHead), ("applies_nothing", AppliesNothing)):
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, transfer)


class Extension:
    """Nothing is added to the worker."""
