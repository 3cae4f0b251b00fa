#include "msim/tensor.h"
