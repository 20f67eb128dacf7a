from .training.hardware import BatchSizeRecommendation as BatchSizeRecommendation
from .training.hardware import HardwareType as HardwareType
from .training.hardware import get_batch_size_recommendation as get_batch_size_recommendation
from .training.placement import DevicePlacement as DevicePlacement
from .training.placement import distribute_batch as distribute_batch
from .training.placement import place_on_device as place_on_device
from .training.placement import prefetch_to_device as prefetch_to_device
